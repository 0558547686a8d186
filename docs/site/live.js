// The live figure: its button shows the frames of the next write. docs/book/figures/write_a_token.py has drawn all
// frames, from the engine's block manager; each group says in which ones it is shown, and <metadata> where a write ends.
"use strict";

// For a phone: places across the wide figure → across a narrow one, in which words keep their size. The arrows, the
// words "2 references" (now "2 refs") and the slots become shorter.
const PLACES = [
  [0, 0], [22, 6], [74, 42], [128, 66], [143, 78], [158, 90], [454, 322], [546, 368], [552, 378], [606, 402],
  [658, 436], [680, 442],
];
function squeeze(svg) {
  const at = (x) => {
    const i = PLACES.findIndex(([from]) => from >= x) || 1, [[x0, y0], [x1, y1]] = PLACES.slice(i - 1, i + 1);
    return y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
  };
  for (const { x, width } of svg.querySelectorAll("rect")) {
    const begin = at(x.baseVal.value);
    width.baseVal.value = at(x.baseVal.value + width.baseVal.value) - begin;
    x.baseVal.value = begin;
  }
  for (const { x1, x2 } of svg.querySelectorAll("line")) {
    for (const x of [x1, x2]) x.baseVal.value = at(x.baseVal.value);
  }
  for (const text of svg.querySelectorAll("text")) {
    const x = Number(text.getAttribute("x"));
    text.setAttribute("x", at(x));
    text.textContent = text.textContent.replace("reference", "ref").replace(/(\d) 个引用/, "引用 $1");
  }
  svg.viewBox.baseVal.width = svg.width.baseVal.value = 442;
}

for (const figure of document.querySelectorAll(".live")) {
  const [svg, button, status] = ["svg", "button", "[role=status]"].map((each) => figure.querySelector(each));
  const groups = [...svg.querySelectorAll("[data-frames]")];
  const ends = svg.querySelector("metadata").textContent.split(" ").map(Number), last = ends.at(-1);
  const [write, again] = button.dataset.words.split("|");
  let frame = 0, timer;

  function show(next) {
    frame = next;
    for (const group of groups) {
      const [first, final] = group.dataset.frames.split(" ").map(Number), shown = first <= frame && frame <= final;
      group.style.visibility = shown ? "visible" : "hidden";
      if (shown && group.dataset.of === "caption") status.textContent = group.textContent;
    }
    const writer = `A${1 + ((ends.filter((end) => end <= frame).length - 1) % 2)}`;  // of the next token
    button.textContent = frame === last ? again : write.replace("A1", writer);
  }

  button.onclick = function step() {
    clearTimeout(timer);
    show(frame === last ? 0 : frame + 1);
    if (!ends.includes(frame)) timer = setTimeout(step, 1800);
  };
  if (figure.clientWidth < 500) squeeze(svg);
  figure.dataset.by = "hand";  // extra.css ends the animation, and cuts off the captions
  for (const { height } of [svg, svg.querySelector("rect")]) height.baseVal.value -= 44;
  svg.viewBox.baseVal.height -= 44;
  button.hidden = false;
  show(0);
}
