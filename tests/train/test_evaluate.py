"""Validation: means by token, the model left as it was."""

import pytest
import torch
from torch import nn

from archipel.errors import DataError
from archipel.train import data, evaluate, models, optim
from archipel.train.models import IGNORED, Batch
from archipel.train.options import DataOptions, ModelOptions, OptimizerOptions, fit

torch.set_num_threads(1)


class Fixed(nn.Module):
    """Scores the input token itself with a given margin over three others."""

    def __init__(self, margin):
        super().__init__()
        self.scores = nn.Parameter(margin * torch.eye(4))
        self.dropout = nn.Dropout(0.9)

    def forward(self, tokens):
        return self.dropout(self.scores[tokens])


def test_means_are_by_token_not_by_batch():
    """Equal scores cost log 4 each; a batch of one token must not weigh like a batch of three."""
    right = Batch(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2]]))
    wrong = Batch(torch.tensor([[3]]), torch.tensor([[0]]))
    found = evaluate.evaluate(Fixed(2.0), [right, wrong])
    normaliser = float(torch.logsumexp(torch.tensor([2.0, 0, 0, 0]), 0))
    assert found.loss == pytest.approx((3 * (normaliser - 2) + normaliser) / 4, rel=1e-6)
    assert (found.accuracy, found.tokens) == (0.75, 4)


def test_padding_is_left_out():
    batch = Batch(torch.tensor([[0, 1, 2]]), torch.tensor([[0, IGNORED, 3]]))
    found = evaluate.evaluate(Fixed(2.0), [batch])
    assert (found.accuracy, found.tokens) == (0.5, 2)


def test_modes_gradients_and_weights_are_left_as_they_were():
    model = nn.Sequential(Fixed(1.0), nn.BatchNorm1d(2)).train()
    model[1].eval()  # frozen statistics, in a model that trains
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate.validation_loss(model, [Batch(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))])
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_modes_are_put_back_when_a_batch_fails():
    model = Fixed(1.0).train()
    with pytest.raises(IndexError):
        evaluate.validation_loss(model, [Batch(torch.tensor([[9]]), torch.tensor([[0]]))])
    assert model.training and torch.is_grad_enabled()


def test_nothing_to_evaluate_on_is_said():
    with pytest.raises(DataError, match="nothing to evaluate"):
        evaluate.validation_loss(Fixed(1.0), [])


def test_vision_transformer_learns_the_digits():
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    data_options = DataOptions(source="digits", shards=2, valid_fraction=0.1)
    loaded = data.load(data_options)
    options = fit(ModelOptions(kind="vit", width=32, layers=1, heads=2), data_options, loaded.vocabulary)
    model, inner = models.build(options, 0), OptimizerOptions(lr=3e-3, warmup_steps=10)
    optimizer, schedule = optim.build(model, inner, 300)
    before = evaluate.accuracy(model, loaded.validation(9, 20))
    stream = loaded.stream(0)
    for tick in range(300):
        optim.inner_step(model, optimizer, stream.next(32), options=inner, lr=schedule(tick))
    assert before < 0.3
    assert evaluate.accuracy(model, loaded.validation(9, 20)) > 0.75
