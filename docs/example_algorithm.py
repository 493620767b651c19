"""An algorithm of your own: ERM that listens most to the domain it does worst on."""

import torch
import torch.nn.functional as F

from hmoe_repro.algorithms.base import ERM, HParam


class WorstDomain(ERM):
    """The loss of every training domain, weighted by how large it is: with `focus` 0 it is ERM,
    and the larger `focus`, the more the worst domain counts."""

    HPARAMS = ERM.HPARAMS | {"focus": HParam(1.0, "how much more a larger loss counts")}

    def loss(self, minibatches):
        losses = torch.stack([F.cross_entropy(self.predict(x), y) for x, y in minibatches])
        weights = torch.softmax(self.hparams["focus"] * losses.detach(), dim=0)
        return {"loss": (weights * losses).sum()}
