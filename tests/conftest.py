"""The test process forks ranks, so it starts no thread pools."""

import torch

torch.set_num_threads(1)
