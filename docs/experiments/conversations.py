"""What a user says in the conversations of quality.py: each is a list of messages, one a turn."""

from __future__ import annotations

QUESTIONS = [
    ["What is the capital of France?"],
    ["Why is the sky blue?"],
    ["How do I boil an egg?"],
    ["What does a compiler do?"],
    ["Name three planets that have rings."],
    ["What is a good name for a cat?"],
    ["Which metal is liquid at room temperature?"],
    ["How many days are there in a leap year?"],
]

CHATS = [
    [
        "I want to learn to cook. Where do I begin?",
        "I have eggs, rice and an onion. What can I make?",
        "How long does the rice take?",
        "What should I buy for the next meal?",
    ],
    [
        "Can you explain what a database is?",
        "What is an index of a database?",
        "When does an index make a query slower?",
        "Give me an example of such a query.",
    ],
    [
        "I will be in Rome for two days. What should I see?",
        "It may rain on the second day. What can I do then?",
        "Where do I find good ice cream?",
        "Make a plan for both days.",
    ],
    [
        "Tell me a short story about a fox.",
        "Give the fox a friend.",
        "Now tell the story as the friend sees it.",
        "What can a child learn from this story?",
    ],
]

BRIDGE = """
The bridge over the mill stream was built in 1884, when the village had a school, two bakeries and a weekly
market. It has three arches of grey stone and a railing of cast iron. In the flood of 1953 the middle arch
cracked, and for eleven years only people on foot were allowed to cross."""

SOUP = """
To make onion soup for four people, cut six large onions into thin rings and cook them slowly in butter until
they are brown. Add a spoonful of flour, a glass of white wine and a litre of stock, and let the soup simmer
for half an hour. Pour it over a slice of toast, cover it with cheese and bake it until the cheese melts."""

CLUB = """
Dear all, the meeting of the garden club on Tuesday has been moved to Thursday at seven, because the hall is
being painted. Please bring the seeds that you want to exchange, in paper bags with the name of the plant and
the year. Maria will show how she grows tomatoes without a greenhouse. Best wishes, Tom"""

BEES = """
Honeybees keep their hive warm in winter. They form a ball around the queen and shiver with the muscles of
their wings, so that the middle of the ball stays at about thirty degrees while it freezes outside. A colony
eats twenty kilograms of honey until March, which is why a beekeeper must not take all of it."""

EDIT_TASKS = [
    "Copy the text, and put a title above it.",
    "Write the text again, with each sentence on a line of its own.",
    "Correct the spelling of the text, and return all of it.",
    "Write the text again in simpler words.",
]
SUMMARY_TASK = "Summarise the text in two sentences."


def ask(text: str, task: str) -> list[str]:
    """A conversation of one message: the text in one line, then the task."""
    line = " ".join(text.split())
    return [f"{line}\n\n{task}"]


TEXTS = [BRIDGE, SOUP, CLUB, BEES]
EDITS = [ask(text, task) for text, task in zip(TEXTS, EDIT_TASKS, strict=True)]
SUMMARIES = [ask(text, SUMMARY_TASK) for text in TEXTS]
TASKS = [ask(text, task) for text in TEXTS for task in [*EDIT_TASKS, SUMMARY_TASK]]

SYSTEM = """You are the assistant of a public library. You answer the questions of visitors in a friendly tone
and in at most three sentences. The library is open from nine to six, on Saturdays until two, and closed on
Sundays. Visitors may borrow ten books for four weeks, and renew each of them twice. If you do not know an
answer, say so, and send the visitor to the desk on the first floor. Never ask for a name or an address."""
