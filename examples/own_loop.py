"""Your own model and loop as one learner of a run. Two edits: the `with` line and `learner.step`.

python examples/own_loop.py --write-init init.safetensors
archipel syncer examples/own_loop.toml --init init.safetensors --listen 127.0.0.1:7000
python examples/own_loop.py --syncer 127.0.0.1:7000 --name a      # in two more terminals, with two names
python examples/own_loop.py --syncer 127.0.0.1:7000 --name b
"""

import argparse

import torch
from torch import nn

import archipel


def build() -> nn.Module:
    """A classifier of points in the plane, with running statistics to show that they are kept in step too."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def batches(shard: int, position: int):
    """Two spirals, drawn without end; a shard of its own for each learner, going on where it stopped."""
    generator = torch.Generator().manual_seed(1_000_003 * shard + position)
    while True:
        radius = torch.rand(256, generator=generator)
        label = torch.randint(0, 2, (256,), generator=generator)
        angle = 3 * torch.pi * radius + torch.pi * label
        yield torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write-init", default="")
    parser.add_argument("--syncer", default="127.0.0.1:7000")
    parser.add_argument("--name", default="")
    parser.add_argument("--out", default="out/own_loop")
    parser.add_argument("--tls", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build()
    if options.write_init:
        archipel.save_weights(model, options.write_init)
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(0.0)
    with archipel.Learner(
        model, optimizer, syncer=options.syncer, name=options.name, out=options.out, tls=options.tls
    ) as learner:
        for inputs, labels in batches(learner.shard, learner.position):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(inputs))
            if learner.done:
                break
    print(f"done after {learner.step_count} steps, round {learner.round}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
