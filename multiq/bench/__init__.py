"""``multiq bench``: the same work on several backends, with proof that nothing was lost while going fast.

``place`` is what a driver brings, ``workloads`` the work, ``accounting`` the proof, ``runner`` the order of it all,
``report`` what comes out; ``table``, ``html`` and ``compare`` show it. Needs the extra ``bench``.
"""
