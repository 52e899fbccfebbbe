"""Word error rates and speed of a Whisper server, beside faster-whisper on the same recordings:

bough serve whisper-tiny.en &
python -m tests.bench.speech --wavs FOLDER --their-python VENV/bin/python --their-model FOLDER

Recordings are the `beckett.wav` and `two_cities.wav` of the package moonshine-voice, where `--wavs` has them, and texts
spoken by espeak-ng, where that is installed. faster-whisper runs in a Python that has it, greedily, before and
not at the same time. Files go one after the other, then all at once.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import soundfile

BECKETT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
TWO_CITIES = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season
of darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before
us, we were all going direct to heaven, we were all going direct the other way. In short, the period was so far like the
present period that some of its noisiest authorities insisted on its being received for good or for evil in the
superlative degree of comparison only."""
GETTYSBURG = """Four score and seven years ago our fathers brought forth on this continent a new nation, conceived in
liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war,
testing whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great
battlefield of that war. We have come to dedicate a portion of that field as a final resting place for those who here
gave their lives that that nation might live. It is altogether fitting and proper that we should do this. But in a
larger sense we can not dedicate, we can not consecrate, we can not hallow this ground. The brave men, living and dead,
who struggled here, have consecrated it, far above our poor power to add or detract. The world will little note, nor
long remember what we say here, but it can never forget what they did here."""
SPOKEN = [
    "The quick brown fox jumps over the lazy dog.",
    "Please send the report to the office before Friday morning.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells for sure.",
    GETTYSBURG,
]
THEIRS = """
import json, sys, time
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type=sys.argv[2], cpu_threads=int(sys.argv[3]))
for path in sys.argv[4:]:
    began = time.perf_counter()
    segments, _ = model.transcribe(path, beam_size=1)
    print(json.dumps([" ".join(each.text for each in segments), time.perf_counter() - began]), flush=True)
"""


def words(text: str) -> list[str]:
    return re.sub(r"[^\w' ]", " ", text.lower()).split()


def errors(expected: str, got: str) -> tuple[int, int]:
    """Words that were put in, left out or changed, and those that there are."""
    said, heard = words(expected), words(got)
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1], len(said)


def recordings(wavs: Path | None, scratch: Path) -> dict[Path, str]:
    found = {}
    for name, text in (("beckett", BECKETT), ("two_cities", TWO_CITIES)):
        if wavs is not None and (path := wavs / f"{name}.wav").is_file():
            found[path] = text
    if shutil.which("espeak-ng"):
        for number, text in enumerate(SPOKEN):
            path = scratch / f"espeak-{number}.wav"
            plain = " ".join(text.split())
            subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), plain], check=True)
            found[path] = text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--wavs", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--their-python")
    parser.add_argument("--their-model", help="a folder of CTranslate2's")
    parser.add_argument("--their-types", nargs="+", default=["int8"])
    parser.add_argument("--threads", type=int, default=2, help="of faster-whisper")
    args = parser.parse_args()
    files = recordings(args.wavs, args.scratch)
    lengths = {path: soundfile.info(path).duration for path in files}

    def tell(name: str, texts: dict[Path, str], seconds: float) -> None:
        counts = {path: errors(files[path], text) for path, text in texts.items()}
        wrong, total = (sum(each[i] for each in counts.values()) for i in (0, 1))
        factor = seconds / sum(lengths.values())
        print(f"{name}: WER {100 * wrong / total:.1f} % ({wrong} of {total}), RTF {factor:.3f}")
        for path, (missed, said) in counts.items():
            print(f"    {path.name} ({lengths[path]:.0f} s): {missed} of {said} words wrong")

    for kind in args.their_types if args.their_python else ():
        command = [args.their_python, "-c", THEIRS, args.their_model, kind, str(args.threads), *map(str, files)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        found = [json.loads(line) for line in lines]
        tell(f"faster-whisper {kind}", dict(zip(files, (f[0] for f in found), strict=True)), sum(f[1] for f in found))

    def ask(path: Path) -> str:
        form = {"model": "whisper", "response_format": "json"}
        with httpx.Client(timeout=600) as http:
            sent = {"file": (path.name, io.BytesIO(path.read_bytes()))}
            answer = http.post(f"{args.url}/v1/audio/transcriptions", data=form, files=sent)
        return str(answer.raise_for_status().json()["text"])

    ask(next(iter(files)))
    began = time.perf_counter()
    texts = {path: ask(path) for path in files}
    tell("bough, one after the other", texts, time.perf_counter() - began)
    began = time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        texts = dict(zip(files, pool.map(ask, files), strict=True))
    tell("bough, all at once", texts, time.perf_counter() - began)


if __name__ == "__main__":
    main()
