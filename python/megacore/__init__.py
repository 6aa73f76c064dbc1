"""megacore: a distributed training runtime, a C++/CUDA core under a thin PyTorch package."""
