from force_field.train import app

app()
