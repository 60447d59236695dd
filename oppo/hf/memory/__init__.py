"""The memory that the models of a run will need, before any of them is loaded.

The code that serves and trains them runs on tensors without data (PyTorch's fake tensors), which have shapes, dtypes
and devices, and the bytes of those that are alive are counted. So an estimate knows the architecture, the attention,
gradient checkpointing, adapters and 16-bit weights as the run will. It leaves out what an allocator rounds up or keeps,
and the work space of kernels.
"""
