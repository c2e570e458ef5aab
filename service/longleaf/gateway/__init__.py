"""The front door: routes, admission, routing and the replicas behind them.

Data flows one way: ``api`` reads a request, ``admission`` decides whether it can ever fit,
``routing`` picks a replica, ``replicas`` talks to it.
"""
