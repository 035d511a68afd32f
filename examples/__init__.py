"""Three examples, and a demo that runs all of them with one worker.

``reset_mail``: a mail that the server refuses for now is retried, and a mail that it refuses for good is buried.
``order_timeout``: a delayed job cancels an unpaid order. A payment deletes this job.
``alarm``: an alarm rings at a deadline, unless it is resolved before. The deadline can be moved.

Each example runs on its own (``python -m examples.reset_mail``), and all of them with ``make demo``. ``tasks.py`` and
most modules beside it are code as in an application. ``story.py`` plays the users, and checks the results.

``foreign_producer``: a shell script and a PHP script that put jobs into beanstalkd without multiq.
"""
