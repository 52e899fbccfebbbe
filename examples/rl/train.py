"""On-policy training of SmolLM2 on a task that a program can check: answers with as few letters "e" as possible.

The engine samples, torch trains (REINFORCE, the mean of a prompt's answers as the baseline), and after each step the
weights go to the engine in place, through shared memory. In float32 both compute the same numbers: each step prints by
how much the logprobs of trainer and engine differ.

    python examples/rl/train.py --steps 10
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

import bough

QUESTIONS = ["Tell me about the sea.", "What is a good breakfast?", "Describe your home.", "Why do people sing?"]
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def reward(text: str) -> float:
    """1 without any e; in plain English one letter in eight is one."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return 1.0 - 8.0 * letters.count("e") / len(letters) if letters else 0.0


def open_trainer(path: Path) -> Any:
    """The model as torch trains it. Files of GGUF are dequantised."""
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)


def sample(engine: bough.Engine, group: int, tokens: int, step: int) -> list[dict[str, Any]]:
    """Each answer has a seed of its own: equal ones would teach nothing."""
    prompts = [TURN.format(question) for question in QUESTIONS for _ in range(group)]
    seeds = range(step * len(prompts), (step + 1) * len(prompts))
    params = [{"temperature": 1.0, "max_new_tokens": tokens, "sampling_seed": seed} for seed in seeds]
    outputs: list[dict[str, Any]] = engine.generate(prompts, params, return_logprob=True, logprob_start_len=0)
    return outputs


def trainer_logprobs(model: Any, outputs: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[answers, tokens] logprobs of what the engine has sampled, and which of them are there."""
    prompts = [[token for _, token, *_ in output["meta_info"]["input_token_logprobs"]] for output in outputs]
    answers = [output["output_ids"] for output in outputs]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind the answers, which do not see it
    scores = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    places = [torch.arange(len(prompt) - 1, len(row) - 1) for prompt, row in zip(prompts, rows, strict=True)]
    taken = [score[place] for score, place in zip(scores, places, strict=True)]
    there = [torch.ones(len(place)) for place in places]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(taken, batch_first=True), pad(there, batch_first=True)


def engine_logprobs(outputs: list[dict[str, Any]]) -> torch.Tensor:
    rows = [[value for value, *_ in output["meta_info"]["output_token_logprobs"]] for output in outputs]
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a GGUF file; SmolLM2-135M-Instruct when left out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group", type=int, default=4, help="answers to each question")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--deterministic", action="store_true", help="sums that do not depend on the batch; slower")
    given = parser.parse_args()
    # Weights and sums in float32, so that trainer and engine can be compared.
    exact = {"dtype": "float32", "quantization": "none", "enable_deterministic_inference": given.deterministic}
    with bough.Engine(given.model, max_total_tokens=8192, **exact) as engine:
        model = open_trainer(Path(engine.get_model_info()["model_path"]))
        optimizer = torch.optim.AdamW(model.parameters(), given.learning_rate, weight_decay=0.0)
        engine.update_weights_from_tensor(model.state_dict(), weight_version="0")
        for step in range(1, given.steps + 1):
            outputs = sample(engine, given.group, given.tokens, step)
            assert {output["meta_info"]["weight_version"] for output in outputs} == {str(step - 1)}
            rewards = torch.tensor([reward(output["text"]) for output in outputs]).view(len(QUESTIONS), -1)
            gains = (rewards - rewards.mean(1, keepdim=True)).flatten()
            logprobs, there = trainer_logprobs(model, outputs)
            difference = ((logprobs.detach() - engine_logprobs(outputs)) * there).abs().max().item()
            loss = -(gains[:, None] * logprobs * there).sum() / there.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            outcome = engine.update_weights_from_tensor(model.state_dict(), weight_version=str(step))
            assert outcome.success, outcome.message
            print(
                f"step {step}: reward {rewards.mean():.3f}, largest difference of logprobs {difference:.1e}", flush=True
            )


if __name__ == "__main__":
    main()
