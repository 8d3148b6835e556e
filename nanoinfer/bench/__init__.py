"""`nanoinfer bench`: what nanoinfer costs, measured beside what others cost, in one run."""
