"""The demo: eight processes train word2vec on real text, three ways at once, and compare them.

`data` gets and cuts the text, `model` is what is trained, `worker` runs as one process per
rank and calls `trainer`, `launcher` starts those in the slow-link network or on loopback, `report`
judges and prints. Only `model` and `trainer` import torch.
"""
