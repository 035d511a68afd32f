"""The execution of jobs: fetching, running, time limits, and the renewal of leases."""
