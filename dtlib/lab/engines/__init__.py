"""The engines of the classroom: started, attached to, ended."""
