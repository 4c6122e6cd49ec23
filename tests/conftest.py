"""Settings that every test shares."""

import torch

# One thread: two workers share two cores, and last digits repeat.
torch.set_num_threads(1)
