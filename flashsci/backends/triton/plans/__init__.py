"""Plans of Triton calls: checked shapes, strides and tiles, and the launches that compute them."""
