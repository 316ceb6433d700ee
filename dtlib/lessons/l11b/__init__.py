NOTEBOOKS = {"lecture": "11b_faults", "exercises": "11b_faults_exercises"}
