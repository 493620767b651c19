"""ERM whose featurizer first learns, from the training images alone, which way up an image is."""

import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.algorithms.base import ERM, HParam, concatenate


class RotationPretrained(ERM):
    """For `pretraining_updates` updates the featurizer predicts by how many quarter turns an image
    was rotated (Gidaris et al., 2018, https://arxiv.org/abs/1803.07728), labels unused; then it is
    ERM, with a new optimiser. No image of the held-out domain is seen in either part."""

    HPARAMS = ERM.HPARAMS | {
        "pretraining_updates": HParam(1000, "updates that predict rotations, before ERM's", min=0)
    }

    def __init__(self, input_shape, num_classes, num_domains, hparams=None):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.turned = nn.Linear(self.featurizer.num_features, 4)

    def rotation_loss(self, x):
        """Cross entropy of the four quarter turns, each for a quarter of the images in turn."""
        turns = torch.arange(len(x), device=x.device) % 4
        rotated = torch.stack([image.rot90(int(k), (-2, -1)) for image, k in zip(x, turns)])
        return F.cross_entropy(self.turned(self.featurizer(rotated)), turns)

    def loss(self, minibatches):
        if self.update_count < self.hparams["pretraining_updates"]:
            x, _ = concatenate(minibatches)
            return {"loss": self.rotation_loss(x)}
        return super().loss(minibatches)

    def update(self, minibatches, unlabeled=None):
        if self.update_count == self.hparams["pretraining_updates"]:
            self.optimizer = None
        return super().update(minibatches, unlabeled)
