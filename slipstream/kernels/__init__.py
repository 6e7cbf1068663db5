"""Triton kernels, each a torch custom op with a torch reference and a fake implementation beside it.

On CUDA tensors an op launches its kernel; on any other device it runs the reference, so a model written with
these ops works everywhere and can be traced without a GPU. `registry.KERNELS` names them all.
"""
