"""litgpt against the plain form: it needs an environment of its own (extra bench-litgpt).

Run by `python -m benchmarks` in `.venv-bench-litgpt`; prints its rows as JSON."""

import json
import sys

import torch

from benchmarks import peers
from benchmarks.contenders import Readable, check_equal, course_model, decoding, token_ids
from benchmarks.rounds import interleave
from benchmarks.sections import rows_of


class Litgpt:
    def __init__(self, model):
        self.model = model

    def start(self, batch: int, capacity: int):
        self.model.max_seq_length = capacity
        self.model.set_kv_cache(batch_size=batch)
        seen = 0

        @torch.inference_mode()
        def step(ids):
            nonlocal seen
            positions = torch.arange(seen, seen + ids.shape[1])
            seen += ids.shape[1]
            return self.model(ids, positions)[:, -1]

        return step


def main(rounds: int) -> list[dict]:
    torch.set_num_threads(1)
    model = course_model()
    forms = {"plain": Readable(model), "litgpt": Litgpt(peers.litgpt_of(model))}
    found = []
    for batch, context, new in ((1, 32, 24), (1, 480, 24), (8, 32, 8), (8, 480, 8)):
        ids = token_ids(model, batch, context + new)
        contenders = {name: decoding(form, ids, context) for name, form in forms.items()}
        same = check_equal(contenders, "plain", peers=("litgpt",))
        case = f"decode, batch {batch}, context {context}"
        found += rows_of(case, interleave(contenders, rounds), "plain", new, same)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
