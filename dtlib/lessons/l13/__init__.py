NOTEBOOKS = {"lecture": "13_slow_network", "exercises": "13_slow_network_exercises"}
