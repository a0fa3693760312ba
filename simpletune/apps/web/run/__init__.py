"""What does a run's page show: progress, charts, pictures, comparisons?"""
