"""JSON out of a text: the program writes the form, the model fills in the values, so the result always parses."""

from __future__ import annotations

import json

import bough as sgl

TEXT = "Ada Lovelace, a mathematician from London, was 27 years old when she published her notes in 1843."


@sgl.function
def extract(s, text):
    s += f"Text: {text}\nThe same facts as JSON:\n"
    with s.var_scope("json"):
        s += '{"name": "' + sgl.gen("name", max_tokens=12, stop='"') + '", '
        s += '"city": "' + sgl.gen("city", max_tokens=12, stop='"') + '", '
        s += '"profession": ' + sgl.select("profession", choices=['"mathematician"', '"painter"', '"sailor"']) + ", "
        s += '"years": ' + sgl.select("years", choices=["17", "27", "72"]) + "}"


def main() -> str:
    return json.dumps(json.loads(extract.run(TEXT, temperature=0)["json"]), indent=2)


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
