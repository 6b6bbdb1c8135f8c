"""One thread a process: ranks are processes, and two cores are all there is."""

import torch

torch.set_num_threads(1)
