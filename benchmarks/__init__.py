"""What the time of a run and of a training goes into; a package, so that no installed one of this name hides it."""
