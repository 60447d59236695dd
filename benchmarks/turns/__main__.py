"""``python -m benchmarks.turns``: prints what an answer costs the others, with the model in a thread or a process."""

from benchmarks.turns.measure import main

if __name__ == "__main__":
    main()
