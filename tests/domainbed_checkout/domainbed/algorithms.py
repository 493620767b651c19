"""Classes with DomainBed's interface, each with one of the habits that an adapter must bear."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from domainbed import networks
from domainbed.lib.misc import MovingMean

try:
    import a_package_that_nobody_has as package
except ImportError:
    package = None

ALGORITHMS = ["ERM", "Adversarial", "Cloning", "Hoarder", "NeedsCuda", "NeedsPackage", "Iterates"]


def together(minibatches):
    return (torch.cat(parts) for parts in zip(*minibatches))


class Algorithm(nn.Module):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__()
        self.hparams = hparams

    def update(self, minibatches, unlabeled=None):
        raise NotImplementedError


class ERM(Algorithm):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.featurizer = networks.Featurizer(input_shape, self.hparams)
        self.classifier = networks.Classifier(
            self.featurizer.n_outputs, num_classes, self.hparams["nonlinear_classifier"]
        )
        self.network = nn.Sequential(self.featurizer, self.classifier)
        self.reset()

    def reset(self):
        decay = self.hparams["weight_decay"]
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=self.hparams["lr"], weight_decay=decay
        )

    def minimise(self, loss, *optimizers):
        for optimizer in optimizers or [self.optimizer]:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers or [self.optimizer]:
            optimizer.step()

    def update(self, minibatches, unlabeled=None):
        x, y = together(minibatches)
        loss = F.cross_entropy(self.predict(x), y)
        self.minimise(loss)
        return {"loss": loss.item()}

    def predict(self, x):
        return self.network(x)


class Adversarial(ERM):
    """Two optimisers in turn, by a counter that is a buffer; no update reports both losses."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.register_buffer("update_count", torch.tensor([0]))
        self.discriminator = nn.Linear(self.featurizer.n_outputs, num_domains)
        self.disc_opt = torch.optim.Adam(self.discriminator.parameters(), betas=(0.5, 0.9))
        del self.optimizer
        self.gen_opt = torch.optim.Adam(self.network.parameters(), lr=self.hparams["lr"])

    def update(self, minibatches, unlabeled=None):
        self.update_count += 1
        x, y = together(minibatches)
        z = self.featurizer(x)
        domains = torch.cat([torch.full_like(y, i) for i, (_, y) in enumerate(minibatches)])
        guess = F.cross_entropy(self.discriminator(z), domains)
        if self.update_count.item() % self.hparams["every"]:
            self.minimise(guess, self.disc_opt)
            return {"disc_loss": guess.item()}
        loss = F.cross_entropy(self.classifier(z), y) - self.hparams["lambda"] * guess
        self.minimise(loss, self.gen_opt)
        return {"gen_loss": loss.item()}


class Cloning(Algorithm):
    """Makes a second network and its optimiser in each update, whose state it keeps."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.made_of = input_shape, num_classes, hparams
        self.network = networks.Whole(*self.made_of)
        self.inner_state = None

    def update(self, minibatches, unlabeled=None):
        self.inner = networks.Whole(*self.made_of, weights=self.network.state_dict())
        self.inner_optimizer = torch.optim.Adam(self.inner.parameters(), lr=self.hparams["lr"])
        if self.inner_state is not None:
            self.inner_optimizer.load_state_dict(self.inner_state)
        for x, y in minibatches:
            loss = F.cross_entropy(self.inner(x), y)
            self.inner_optimizer.zero_grad()
            loss.backward()
            self.inner_optimizer.step()
        self.inner_state = self.inner_optimizer.state_dict()
        with torch.no_grad():
            for own, moved in zip(self.network.parameters(), self.inner.parameters()):
                own += 0.5 * (moved - own)
        return {"loss": loss.item()}

    def predict(self, x):
        return self.network(x)


class Hoarder(ERM):
    """State wherever it is convenient: a buffer that grows, objects in a list, modules and
    optimisers in lists, a tensor that is no buffer, and an optimiser that is made anew."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.register_buffer("q", torch.Tensor())
        self.means = [MovingMean() for _ in range(num_domains)]
        width = self.featurizer.n_outputs
        self.heads = [nn.Linear(width, num_classes) for _ in range(num_domains)]
        self.head_opts = [torch.optim.SGD(h.parameters(), 0.1, 0.9) for h in self.heads]
        self.alpha, self.seen = torch.ones(num_domains), 0

    def update(self, minibatches, unlabeled=None):
        if not len(self.q):
            self.q = torch.ones(len(minibatches))
        if self.seen == 5:
            self.reset()
        self.seen += 1
        total = 0.0
        for i, (x, y) in enumerate(minibatches):
            z = self.featurizer(x)
            loss = F.cross_entropy(self.classifier(z), y)
            self.minimise(F.cross_entropy(self.heads[i](z.detach()), y), self.head_opts[i])
            self.q[i] *= (0.1 * loss.detach()).exp()
            self.alpha[i] *= 1 + self.means[i]("loss", loss).item()
            penalty = (self.heads[i](z) - self.classifier(z)).square().mean()
            total = total + self.q[i] * self.alpha[i] / self.alpha.sum() * (loss + penalty)
        self.minimise(total)
        return {"loss": total}

    def train(self):
        self.featurizer.train()

    def eval(self):
        self.featurizer.eval()


class Probes(ERM):
    """Trains its classifier alone first, with the featurizer frozen, then everything."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.featurizer.requires_grad_(False)
        self.seen = 0

    def update(self, minibatches, unlabeled=None):
        if self.seen == 5:
            self.featurizer.requires_grad_(True)
            self.reset()
        self.seen += 1
        return super().update(minibatches)


class Regroups(Probes):
    """The same with an optimiser of the classifier alone, then one of everything."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.optimizer = torch.optim.Adam(self.classifier.parameters(), lr=self.hparams["lr"])


class Schedules(ERM):
    """Asks for the validation loss at checkpoints, lowers its rate, and ends at the fourth."""

    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.lr_schedule, self.val_losses = [], []

    def set_lr(self, eval_loaders_iid=None, schedule=None, device=None):
        with torch.no_grad():
            means = []
            for loader in eval_loaders_iid:
                total = 0.0
                for x, y in loader:
                    total += F.cross_entropy(self.network(x.to(device)), y.to(device))
                means.append(total / len(loader))
            self.val_losses.append(torch.stack(means).mean().item())
        self.scheduler.step(1.0)  # never better
        self.lr_schedule.append(self.scheduler.get_last_lr())
        if len(self.lr_schedule) == 4:
            self.lr_schedule[-1] = [0.0]
        return self.lr_schedule


class URM(ERM):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        assert type(self.featurizer) in [networks.Whole]


class Fussy(URM):
    """The same under a name that nobody knows."""


class NeedsCuda(ERM):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.alpha = torch.ones(num_domains).cuda()


class NeedsPackage(ERM):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        assert package is not None, "Install it with: pip install a-package-that-nobody-has"
        super().__init__(input_shape, num_classes, num_domains, hparams)


class Iterates(ERM):
    def __init__(self, input_shape, num_classes, num_domains, hparams):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.steps = itertools.count()


class Wrong(ERM):
    def update(self, minibatches, unlabeled=None):
        return {"loss": self.hparams["no_such_setting"]}
