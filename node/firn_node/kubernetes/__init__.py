"""What a broker in a pod has to do with the Kubernetes API; loaded there alone."""
