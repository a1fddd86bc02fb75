"""Triton kernels and the functions that they share; nothing here plans or launches one."""
