"""What Lastbit is measured against: other ways to know that a batch is done, each as its users run it; one a file."""
