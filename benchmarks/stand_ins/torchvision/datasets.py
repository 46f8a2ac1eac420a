"""Images of 28 x 28 pixels, each with one drawn stroke, in place of MNIST."""

import numpy as np
import torch


class MNIST(torch.utils.data.Dataset):
    """Strokes: bent lines of random place, length and direction, white on black.

    There are 6,000 images to train and 1,000 to test, always the same.
    """

    def __init__(self, root, train=True, download=False, transform=None):
        count, seed = (6000, 0) if train else (1000, 1)
        random = np.random.default_rng(seed)
        along = np.linspace(0, 1, 12)  # positions along a stroke
        grid = np.arange(28)
        self.images = []
        for _ in range(count):
            begin, middle, end = random.uniform(5, 23, (3, 2))
            points = (
                np.outer((1 - along) ** 2, begin)
                + np.outer(2 * along * (1 - along), middle)
                + np.outer(along**2, end)
            )  # [12, 2], a quadratic Bezier curve
            x = (grid[None, :] - points[:, :1]) ** 2  # [12, 28]
            y = (grid[None, :] - points[:, 1:]) ** 2
            ink = np.exp(-(y[:, :, None] + x[:, None, :]) / 2).max(0)
            self.images.append(torch.tensor(ink, dtype=torch.float32)[None])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number], 0
