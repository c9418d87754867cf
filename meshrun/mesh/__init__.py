"""The mesh of this process. These modules import torch only when they need it."""
