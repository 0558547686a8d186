// The live figure: its button shows the frames of the next write. docs/book/figures/write_a_token.py has drawn all
// frames, from the engine's block manager; each group says in which ones it is shown, and <metadata> where a write ends.
"use strict";

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
    button.textContent = frame === last ? again : write;
  }

  button.onclick = function step() {
    clearTimeout(timer);
    show(frame === last ? 0 : frame + 1);
    if (!ends.includes(frame)) timer = setTimeout(step, 1800);
  };
  figure.dataset.by = "hand";  // extra.css ends the animation, and cuts off the captions
  for (const { height } of [svg, svg.querySelector("rect")]) height.baseVal.value -= 44;
  svg.viewBox.baseVal.height -= 44;
  button.hidden = false;
  show(0);
}
