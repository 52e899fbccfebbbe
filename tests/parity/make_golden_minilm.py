"""Makes golden_minilm.json: what sentence-transformers gives for some texts, in fp32.

pip install sentence-transformers && python -m tests.parity.make_golden_minilm
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path

from bough.loader.locate import locate

FILE = Path(__file__).with_name("golden_minilm.json")
TEXTS = [
    "The cat sits outside.",
    "x",
    "Größe, naïveté und 漢字 in einem Satz; with digits 12,345.67 and\ta tab.",
    "A man is playing guitar while " + "the rain falls on the roof and " * 20 + "nobody listens.",
]


def main() -> None:
    theirs = importlib.import_module("sentence_transformers")
    model = theirs.SentenceTransformer(str(locate("all-MiniLM-L6-v2").folder), device="cpu")
    vectors = model.encode(TEXTS).astype("<f4")
    made = {"sentence-transformers": theirs.__version__, "texts": TEXTS}
    FILE.write_text(json.dumps({**made, "vectors": base64.b64encode(vectors.tobytes()).decode()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
