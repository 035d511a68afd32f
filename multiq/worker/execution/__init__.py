"""From a reserved job to its verdict: fetching, running, time limits, leases kept alive."""
