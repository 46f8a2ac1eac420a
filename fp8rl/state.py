"""State dictionaries for objects that are not modules."""

import torch


class TensorState:
    """A base class for objects whose state is a few tensors: the attributes that NAMES lists.

    As for a module, `state_dict` returns the tensors by name, and `load_state_dict` restores them.
    """

    NAMES: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors, by name."""
        return {
            name: getattr(self, name).clone(memory_format=torch.contiguous_format)
            for name in self.NAMES
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copies saved tensors into the object's tensors, in place, because other objects may hold
        them."""
        for name in self.NAMES:
            tensor = getattr(self, name)
            tensor.copy_(state[name].view_as(tensor))
