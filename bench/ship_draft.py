"""Put a trained draft into the package, as the default model's, with its model card.

    python bench/ship_draft.py DRAFT --results FILE [--kind eagle3] [--folder DIR]

DRAFT: what `slipstream train` has written. FILE: JSON like those in bench/results, with "train" (the commands),
"command" (of `bench accept`), "hardware", "versions" and "runs": lists of rows by name. Runs whose names begin with
--kind are the card's table; the first of them, a greedy chain, gives the acceptance by position that adaptive drafting
starts from. Tables that are the target's must not be in the draft, and all together must stay below 20 MB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT = 20_000_000
CARD = """\
# {kind} draft for SmolLM2-135M-Instruct

Drafts for [SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), used with it unless
`--draft` says otherwise. Output is the model's own with any draft: this one only decides how fast it comes.

* **Format**: {format}.
  Embedding and output head are the model's and are not in the file: {size:.1f} MB in bf16. Beside 4-bit weights
  on a CPU it is kept with 8 bits.
* **Data**: the model's own answers, {conversations:,} conversations with {answer_tokens:,} answer tokens. {prompts}
* **Training**: {steps:,} steps of batch {batch}, rate {lr}, seed {seed}; {hardware}; {versions}.
* **Acceptance of held-out text** by position: {held_out}.
* **Licence**: Apache-2.0, as the model's.

## Commands

```sh
{train}
```

## Tokens per round

`{command}`

{table}
"""


def card(values: dict[str, Any], results: dict[str, Any], runs: dict[str, list[dict[str, Any]]], size: int) -> str:
    """The model card. values: config.json; runs: those of this draft."""
    facts = values["slipstream_training"]
    layers, vocabulary = values.get("num_hidden_layers", 1), values.get("draft_vocab_size", values["vocab_size"])
    names = list(runs)
    by_category = {r["category"]: r["prompts"] for r in runs[names[0]]}
    tau = {n: {r["category"]: r["acceptance_length"] for r in rows} for n, rows in runs.items()}
    head = ["| category | prompts | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    lines = [
        f"| {category} | {count} | " + " | ".join(f"{tau[n][category]:.2f}" for n in names) + " |"
        for category, count in by_category.items()
    ]
    held_out = results.get("held_out_acceptance", {}).get(facts["kind"], facts["acceptance"])
    return CARD.format(
        kind={"eagle3": "EAGLE-3", "dspark": "DSpark"}[facts["kind"]],
        format=f"the released one of {values['architectures'][0]}: {layers} layer, MLP {values['intermediate_size']:,} "
        f"wide, draft vocabulary of {vocabulary:,} tokens",
        size=size / 1e6, prompts=results.get("prompts", "Where their prompts come from is in the commands."),
        conversations=facts["conversations"],
        answer_tokens=facts["answer_tokens"], steps=facts["steps"], batch=facts["batch"], lr=facts["lr"],
        seed=facts["seed"], hardware=results["hardware"],
        versions=", ".join(f"{k} {v}" for k, v in results["versions"].items()),
        held_out=", ".join(f"{a:.2f}" for a in held_out), command=results["command"],
        train="\n".join(line for line in results["train"] if f"train {_other(facts['kind'])}" not in line),
        table="\n".join(head + lines),
    )  # fmt: skip


def _other(kind: str) -> str:
    return "dspark" if kind == "eagle3" else "eagle3"


def main(argv: list[str] | None = None) -> int:
    from slipstream.draft.default import FOLDER

    parser = argparse.ArgumentParser(description="Put a trained draft into the package, with its model card.")
    parser.add_argument("draft", metavar="DRAFT")
    parser.add_argument("--results", metavar="FILE", required=True)
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--folder", metavar="DIR", default=str(FOLDER))
    args = parser.parse_args(argv)
    source, folder = Path(args.draft), Path(args.folder)
    values = json.loads((source / "config.json").read_text())
    results = json.loads(Path(args.results).read_text())
    runs = {name: rows for name, rows in results["runs"].items() if name.startswith(args.kind)}
    if not runs or values["slipstream_training"]["kind"] != args.kind:
        parser.error(f"--kind {args.kind}: {args.results} or {source} is of another kind")
    weights = source / "model.safetensors"
    extra = [source / "temperatures.json"] if (source / "temperatures.json").is_file() else []
    size = sum(path.stat().st_size for path in (weights, *extra))
    if size > LIMIT:
        parser.error(f"{source}: {size / 1e6:.1f} MB is above {LIMIT / 1e6:.0f} MB; train a smaller draft")
    first = next(iter(runs.values()))
    values["slipstream_training"]["target"] = "SmolLM2-135M-Instruct"
    values["slipstream_training"]["acceptance"] = first[-1]["conditional_acceptance"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (weights, *extra):
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    (folder / "README.md").write_text(card(values, results, runs, size))
    print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
