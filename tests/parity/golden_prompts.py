"""The texts behind the golden file: as varied as what people send, and six that share a long beginning.

Only `make_golden` reads them; the tests take token ids from the golden file. There are more than are needed: one whose
continuation passes through a near tie is left out and a spare at the end takes its place.
"""

from __future__ import annotations

Messages = list[dict[str, str]]

LIGHTHOUSE = """\
The lighthouse at Carrow Point had not been lit for eleven years when the council decided to sell it. Nobody in \
the town was surprised. Ships had stopped using the northern channel after the new harbour opened on the far \
side of the bay, and the last keeper, a quiet man called Tobias Wren, had moved inland to live with his \
daughter. Since then the gulls had taken over the gallery, the glass of the lantern had cracked in two places, \
and the iron stairs inside the tower had rusted to the colour of dried tea.

Margaret Ellis saw the advertisement on a Tuesday, while she was waiting for her car to be repaired. She was an \
engineer who had spent thirty years designing pumps for water treatment plants, and she had retired the previous \
spring with a good pension and no clear idea of what to do next. The advertisement was short. It gave the price, \
which was low, and a list of defects, which was long. At the bottom somebody had added a sentence that did not \
belong in an advertisement at all: "On a clear night you can see the lights of four other towers, and you will \
feel that they can see you."

She drove out to the point the same afternoon. The road ended at a gate, and beyond the gate a path of broken \
shells led across the heath to the tower. The door was swollen with damp and opened only when she put her \
shoulder against it. Inside it smelled of salt and old paint. She climbed slowly, testing every step with her \
foot before trusting it, and counted as she went: one hundred and twelve steps to the watch room, and fourteen \
more on a ladder to the lantern itself.

The lens was still there. It stood in the middle of the room under a grey tarpaulin, taller than she was, and \
when she pulled the cloth away the low sun came through the prisms and threw bands of colour on the wall. Each \
piece of glass had been ground by hand more than a century ago, and each was set at a slightly different angle, \
so that all the light of a small lamp would leave the tower as a single beam. Margaret walked around it twice. \
Then she sat down on the floor with her back against the wall and began to write a list in the small notebook \
that she always carried. The first line said: dry the tower. The second line said: save the stairs.

It took her two winters. A mason from the next village repaired the outer wall, a welder who owed her a favour \
replaced forty of the steps, and a museum on the mainland lent her the drawings of the clockwork that had once \
turned the lens. On the first night that everything worked she switched on the lamp, went out on the gallery and \
waited. After a while she saw, far away to the south, a light that she had not noticed before. It blinked three \
times, was dark for a moment, and then"""

RIVER = """\
A river changes shape as it travels. Near its source, where the ground is steep, the water moves quickly and \
cuts downwards, so that the valley has the form of a narrow V. Further down, where the slope is gentle, the \
river slows and begins to swing from side to side. Water on the outside of a bend moves faster than water on the \
inside, so the outer bank is worn away while sand and gravel settle on the inner one. Over many years the bends \
grow larger and larger, until only a thin neck of land separates one from the next. During a flood the river may \
break through that neck and take the shorter way. The old bend is then left behind as a curved lake, which \
slowly fills with mud and plants. Near the sea the river carries a great load of fine material, and because the \
water is almost still, that load sinks to the bottom and builds a delta. The delta grows outwards every year, \
and the river divides into many small channels that change their course again and again. People have always \
settled in such places, because the soil is rich and the land is flat, but they pay for it with floods. In \
summary, the three stages of a river are"""

SYSTEM = """\
You are the assistant of Fernhill Library, a small public library with two floors, a reading garden and a \
workshop. Answer in a friendly tone and in no more than three sentences. The library is open from nine in the \
morning until seven in the evening from Tuesday to Saturday, and it is closed on Sunday and Monday. A membership \
is free for everyone who lives in the county; visitors pay five pounds for a month. Members may borrow up to \
twelve books for three weeks and may renew them twice, unless somebody else has reserved them. Films and games \
may be borrowed for one week. A book that comes back late costs ten pence for each day. The workshop has two \
sewing machines, a laser cutter and a 3D printer, and it can be booked for two hours at a time. Children under \
twelve need an adult with them in the workshop. If you do not know the answer, say so and give the telephone \
number of the front desk, which is 0555 0142."""


def chat(*turns: str, system: str | None = None) -> Messages:
    """A conversation that begins with the user and alternates."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    return opening + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


PROMPTS: dict[str, str | Messages] = {
    "very short": "The",
    "fact": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "letter": "Dear Ms Okafor,\n\n"
    "Thank you for your letter of 3 March about the broken radiator in flat 12. I am writing to",
    "python": 'def merge_sorted(a: list[int], b: list[int]) -> list[int]:\n    """Merge two sorted lists."""\n',
    "javascript": "// Debounce a function\nfunction debounce(fn, wait) {\n  let timer = null;\n  return",
    "sql": "-- The ten customers who spent the most in 2023\nSELECT c.name, SUM(o.total) AS spent\nFROM customers c\n",
    "maths": "Question: A train travels 180 km in 2.5 hours. What is its average speed?\n"
    "Answer: Let's think step by step.",
    "sequence": "2, 4, 8, 16, 32, 64, 128,",
    "list": "Ten things to pack for a week in the mountains:\n1. Warm jacket\n2. Boots\n3.",
    "json": '{"city": "Oslo", "country": "Norway", "population": 709037}\n{"city": "Lyon", "country":',
    "table": "| Planet | Moons | Diameter (km) |\n|---|---|---|\n| Mercury | 0 | 4879 |\n"
    "| Venus | 0 | 12104 |\n| Earth |",
    "chinese": "北京是中国的首都，",
    "arabic": "القاهرة هي عاصمة مصر و",
    "russian": "Москва — столица России. В этом городе",
    "japanese": "東京は日本の首都で、",
    "emoji": "🎉🎂 Happy birthday! 🥳🎈 Today we are going to 🚗➡️🏖️ and",
    "repeated": "na " * 40,
    "whitespace": "\n\n\t\titem one\n\n\n\t\t    item two\n\n\n\n\t\t        item three\n\n\n\n\n",
    "long": LIGHTHOUSE,
    "middling": RIVER,
    "chat": chat("What is gravity? Explain it to a child."),
    "chat system": chat("Tell me about your ship.", system="You are a pirate. Answer like one."),
    "chat turns": chat("Hi, I am Lena.", "Hello Lena! How can I help you?", "Which name did I just tell you?"),
    "chat code": chat("Write a Python function that reverses the words of a sentence."),
    "chat poem": chat("Write a short poem about autumn."),
    "library hours": chat("When are you open on Saturday?", system=SYSTEM),
    "library loans": chat("How many books may I borrow, and for how long?", system=SYSTEM),
    "library fees": chat("I brought a book back six days late. What does it cost?", system=SYSTEM),
    "library tools": chat("Do you have a laser cutter?", system=SYSTEM),
    "library games": chat("How long may I keep a game?", system=SYSTEM),
    "library child": chat("May my son, who is nine, use the 3D printer alone?", system=SYSTEM),
    # Spares.
    "library pets": chat("May I bring my dog to the reading garden?", system=SYSTEM),
    "library join": chat("I live in the next county. Can I become a member?", system=SYSTEM),
    "french": "La tour Eiffel est un monument situé à Paris. Elle a été construite",
    "spanish": "El río más largo de América del Sur es",
    "recipe": "Pancakes for four people.\n\nIngredients:\n- 200 g flour\n- 2 eggs\n-",
    "shell": "#!/bin/sh\n# Delete log files older than thirty days\nset -eu\n",
    "dialogue": '"Where were you last night?" asked the inspector.\n\n"At home,"',
    "chat list": chat("Name five animals that live in the desert."),
}
