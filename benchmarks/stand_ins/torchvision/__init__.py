"""A stand-in for torchvision: as much of it as pytorch/examples' vae/main.py calls.

It has drawn strokes in place of MNIST, because the benchmarks download no data, and writes no
pictures. scripts.py puts this folder on the path of that script.
"""
