"""ReAct: the model thinks and acts, a tool answers, until it has what it needs. The tool is a calculator."""

from __future__ import annotations

import ast
import operator

import bough as sgl

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXAMPLE = """Question: A box holds 12 eggs. How many eggs are in 7 boxes?
Thought: I need to multiply 12 by 7.
Action: Calculate
Input: 12 * 7
Observation: 84
Thought: I know the answer.
Action: Finish
Answer: 84

"""


def calculate(text: str) -> str:
    """The value of a sum such as `12 * (3 + 4)`; only numbers and the four operations."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return f"{value(ast.parse(text.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return "error: not a sum"


@sgl.function
def react(s, question, steps=3):
    s += EXAMPLE + f"Question: {question}\n"
    for step in range(steps):
        s += "Thought:" + sgl.gen("thought", max_tokens=24, stop="\n") + "\nAction: "
        if step == 0:
            s += sgl.select("action", choices=["Calculate"])  # it has nothing to finish with yet
        else:
            s += sgl.select("action", choices=["Calculate", "Finish"])
        if s["action"] == "Finish":
            break
        s += "\nInput:" + sgl.gen("input", max_tokens=16, stop="\n")
        s += f"\nObservation: {calculate(s['input'])}\n"
    s += "\nAnswer:" + sgl.gen("answer", max_tokens=8, stop="\n")


def main() -> str:
    state = react.run("A pen costs 3 coins. How many coins do 15 pens cost?", temperature=0)
    return state.text().removeprefix(EXAMPLE)


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
