"""What a new process of `multiprocessing` says of itself; it imports nothing large."""

import os
import sys


def tell_variables(pipe):
    "Send the environment, and whether PyTorch is imported."
    pipe.send((dict(os.environ), "torch" in sys.modules))
