"""``python -m benchmarks.policy_place [--ray]``: prints what decoding costs in a thread, a process and an actor."""

from benchmarks.policy_place.measure import main

if __name__ == "__main__":
    main()
