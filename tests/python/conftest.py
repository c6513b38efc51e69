import torch

# Ranks are forked: the parent must not start threads.
torch.set_num_threads(1)
