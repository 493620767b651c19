"""WorstDomain: an algorithm of your own, which trains as it is.

The next three commands check it, train it with one domain held out (seconds), and compare it with
ERM on each domain and three seeds (minutes):

    python docs/example_algorithm.py
    hmoe train --algorithm docs/example_algorithm.py:WorstDomain --dataset DigitDomains --test-domain sketch \
        --network small_cnn --steps 701 --set batch_size=16
    python -c "import hmoe_repro as h; print(h.compare(['ERM','docs/example_algorithm.py:WorstDomain'],'DigitDomains'))"
"""

import torch.nn.functional as F
from hmoe_repro.algorithms.base import ERM, HParam, concatenate, register
from hmoe_repro.algorithms.tools import domain_means
from hmoe_repro.networks.search_space import Uniform

# Change: your hyper-parameters. Each has a default, what it means, what a random search draws,
# and bounds. `--set focus=0.8` of hmoe train sets it.
FOCUS = HParam(0.5, "weight of the penalty", search=Uniform(0, 1), min=0, max=1)


# Change: your paper and year; needs_domain_labels=False if nothing tells domains apart.
@register("WorstDomain", paper="not published", needs_domain_labels=True)
class WorstDomain(ERM):
    """ERM with a penalty: how much worse the worst domain is than the average one."""

    HPARAMS = ERM.HPARAMS | {"focus": FOCUS}

    # Layers of your own are made in an __init__, after a call of super().__init__.
    # A file that is read there is declared, files = {"teacher": "teacher.pt"}: its content is part
    # of the run. Open self.files["teacher"].

    def loss(self, minibatches):
        """Change: 'loss' is minimised; what else is returned, tensors of one number, is logged."""
        x, y = concatenate(minibatches)  # (x, y) of each training domain, in one batch
        losses = F.cross_entropy(self.predict(x), y, reduction="none")  # of each image
        of_domains = domain_means(losses, minibatches)
        penalty = of_domains.max() - of_domains.mean()
        loss = of_domains.mean() + self.hparams["focus"] * penalty
        return {"loss": loss, "penalty": penalty}

    def predict(self, x):
        """Logits (B, classes) of images x (B, C, H, W). Change: nothing, if ERM's will do."""
        return self.classifier(self.featurizer(x))


if __name__ == "__main__":
    from hmoe_repro.algorithms.conformance import check_algorithm

    check_algorithm(WorstDomain)
    print("WorstDomain passes: its training is finite, repeatable and resumable")
