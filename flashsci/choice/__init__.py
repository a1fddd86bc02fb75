"""The choice of a backend for a call and for its gradients."""
