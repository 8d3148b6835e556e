"""The machine and this process: copies to a device, helper processes, threads, files that are kept."""
