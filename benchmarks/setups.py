"""What would two set-ups of the literature take, over which links, raw or with 4 bits a value?

Nothing is run: pipecomm.schedule.simulate predicts it from published sizes. `--json`: a line each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipecomm._native import core
from pipecomm.schedule import Costs, build


class Setup(NamedTuple):
    """A model cut into `num_stages`, each on a group of `gpus_per_stage` that share its tensors.

    `num_replicas` such pipelines add up their gradients after each step, over equal links.
    """

    name: str
    num_layers: int
    hidden: int
    num_parameters: float
    sequence: int
    num_stages: int
    gpus_per_stage: int
    num_microbatches: int
    num_replicas: int


class Link(NamedTuple):
    name: str
    bytes_per_s: float
    latency_s: float


# Layers, width, parameters, sequence: GPT-3, Brown et al. 2020, table 2.1; LLaMA-65B, Touvron et
# al. 2023, table 2. GPT-3's stages are groups of 8 GPUs, as in Megatron-LM (Narayanan et al. 2021).
SETUPS = (
    Setup("GPT-3 175B, 8 stages", 96, 12288, 175e9, 2048, 8, 8, 64, 8),
    Setup("LLaMA-65B, 4 stages", 80, 8192, 65.2e9, 2048, 4, 8, 32, 8),
)
# Per direction and GPU. NVIDIA A100 datasheet: NVLink 600 GB/s and PCIe 4.0 64 GB/s, both ways
# together. Latencies are round numbers: to be measured.
LINKS = (
    Link("NVLink", 300e9, 5e-6),
    Link("PCIe 4.0", 32e9, 1e-5),
    Link("100 Gbit/s", 12.5e9, 2e-5),
    Link("10 Gbit/s", 1.25e9, 5e-5),
)
# Of one GPU: 380 tokens/s on LLaMA-65B (Touvron et al. 2023, section 2.4) x 6 x 65.2e9.
FLOPS_PER_S = 148e12
# Bytes a layer keeps for each value of its input, attention's own left out (Korthikanti et al.
# 2022, section 4.1, with the attention recomputed as FlashAttention does).
ACTIVATION_BYTES_PER_VALUE = 34
# bf16 weights and gradients, fp32 copy and two moments (Rajbhandari et al. 2020, section 3.1).
STATE_BYTES_PER_PARAMETER = 16


def costs_of(setup: Setup, link: Link, codec: str) -> Costs:
    """Per GPU: a microbatch is one sequence; its boundary tensor is shared by the stage's GPUs."""
    parameters = setup.num_parameters / setup.num_stages / setup.gpus_per_stage
    values = setup.sequence * setup.hidden // setup.gpus_per_stage
    forward_s = 2 * parameters * setup.sequence / FLOPS_PER_S
    message_nbytes = core.codec_wire_nbytes(codec, 1, values) if codec != "raw" else 2 * values
    layers = setup.num_layers / setup.num_stages
    # A ring sends every gradient (bf16) twice but for one part in as many as there are replicas.
    reduced_nbytes = 2 * 2 * parameters * (1 - 1 / setup.num_replicas)
    return Costs(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        forward_nbytes=message_nbytes,
        backward_nbytes=message_nbytes,
        link_bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        reduce_s=reduced_nbytes / link.bytes_per_s,
        activation_nbytes=ACTIVATION_BYTES_PER_VALUE * values * layers,
        weights_nbytes=STATE_BYTES_PER_PARAMETER * parameters,
    )


def predictions() -> Iterator[dict[str, Any]]:
    """By set-up, link, codec and schedule."""
    for setup in SETUPS:
        for link in LINKS:
            for codec in ("raw", "int4"):
                costs = costs_of(setup, link, codec)
                for name in ("1f1b", "zb-h1"):
                    schedule = build(name, setup.num_stages, setup.num_microbatches)
                    result = schedule.simulate(costs)
                    yield {
                        "setup": setup.name,
                        "link": link.name,
                        "codec": codec,
                        "schedule": name,
                        "step_s": result.step_s,
                        "bubble": result.bubble,
                        "exposed_comm_s": max(result.exposed_comm_s),
                        "exposed_reduce_s": result.exposed_reduce_s,
                        "peak_nbytes": max(result.peak_nbytes),
                        "link_nbytes": costs.forward_nbytes * setup.num_microbatches,
                    }


def table() -> str:
    """As Markdown."""
    lines = [
        "| set-up | link | boundary | schedule | step | bubble | waits for transfers "
        "| waits for reduction | GPU memory | sent each way |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['setup']} | {row['link']} | {row['codec']} | `{row['schedule']}` "
        f"| {row['step_s']:.2f} s | {row['bubble']:.1%} | {row['exposed_comm_s'] * 1e3:.1f} ms "
        f"| {row['exposed_reduce_s'] * 1e3:.0f} ms | {row['peak_nbytes'] / 2**30:.0f} GiB "
        f"| {row['link_nbytes'] / 2**20:.0f} MiB |"
        for row in predictions()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON line for each prediction")
    if parser.parse_args().json:
        for row in predictions():
            print(json.dumps(row))
    else:
        print(table())


if __name__ == "__main__":
    main()
