"""Where does a step's time go? PyTorch Profiler traces of chosen epochs, with a summary beside each."""
