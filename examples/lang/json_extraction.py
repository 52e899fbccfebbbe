"""JSON out of a text, in two ways that always parse: the model writes what a schema allows, or the program writes the
form and the model fills in the values."""

from __future__ import annotations

import json

import bough as sgl

TEXT = "Ada Lovelace, a mathematician from London, was 27 years old when she published her notes in 1843."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "years": {"type": "integer", "maximum": 120}},
    "required": ["name", "years"],
    "additionalProperties": False,
}


@sgl.function
def by_schema(s, text):
    s += f"Text: {text}\nName and age as JSON:\n"
    s += sgl.gen("json", max_tokens=48, json_schema=PERSON)


@sgl.function
def by_form(s, text):
    s += f"Text: {text}\nThe same facts as JSON:\n"
    with s.var_scope("json"):
        s += '{"name": "' + sgl.gen("name", max_tokens=12, stop='"') + '", '
        s += '"city": "' + sgl.gen("city", max_tokens=12, stop='"') + '", '
        s += '"profession": ' + sgl.select("profession", choices=['"mathematician"', '"painter"', '"sailor"']) + ", "
        s += '"years": ' + sgl.select("years", choices=["17", "27", "72"]) + "}"


def main() -> str:
    found = [program.run(TEXT, temperature=0)["json"] for program in (by_schema, by_form)]
    return "\n".join(json.dumps(json.loads(text)) for text in found)


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
