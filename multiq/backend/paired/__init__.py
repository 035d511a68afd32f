"""A pair of two backends: ``beanstalk://host?store=URL``. One backend stores only jobs. A store beside it keeps
everything else.

The *primary* has the jobs that can run. Any backend with outcomes, notes and held jobs can be the *store*.
docs/decisions/0056 has the reasons for this design.
"""
