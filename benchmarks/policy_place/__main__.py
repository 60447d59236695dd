"""``python -m benchmarks.policy_place``: prints what decoding costs in a thread and in a process."""

from benchmarks.policy_place.measure import main

if __name__ == "__main__":
    main()
