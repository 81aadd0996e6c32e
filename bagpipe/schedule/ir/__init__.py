"""The schedule IR: operations, actions, programs, loops and their dependency graph."""
